"""Alembic's environment: how the schema came to be, one step a file."""
