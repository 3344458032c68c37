"""A run drawn and explained: the HTML page, its charts, the diagnosis, and the tables on the console."""
