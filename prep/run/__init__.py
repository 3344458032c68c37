"""The conversion: worker processes of this machine, jobs on any machine, or a Ray cluster."""
