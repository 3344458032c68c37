"""The toolkit of the HTML reports of prep and train: one page template, its parts, and SVG charts."""
