"""The scheduler's memory: SQLite or Postgres behind units that are written whole or not at all."""
