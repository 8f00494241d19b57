"""Run by Alembic, always on a connection that the store opened, within its transaction."""

from alembic import context

from services.scheduler.store.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table="libra_schema",
)
context.run_migrations()
