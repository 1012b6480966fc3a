"""A checkpoint seen from outside: views, tables, checks, commands."""
