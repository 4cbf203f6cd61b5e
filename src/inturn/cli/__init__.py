"""The command line `inturn`: one file per command; `main.py` joins the commands."""
