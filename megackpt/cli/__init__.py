"""One file per command, loaded late by the table in ``main.py``."""
