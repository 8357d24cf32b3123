"""Alembic's `env.py`, with one line for Semel: its tables are in the database, and are no models of yours."""

from alembic import context
from sqlalchemy import Column, Integer, MetaData, NullPool, Table, engine_from_config

from semel.stores.alembic import include_name

metadata = MetaData()  # yours, such as Base.metadata
Table("orders", metadata, Column("id", Integer, primary_key=True))

settings = context.config.get_section(context.config.config_ini_section, {})
engine = engine_from_config(settings, poolclass=NullPool)

with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        include_name=include_name,  # leaves semel_keys, semel_audit and the like alone
    )
    with context.begin_transaction():
        context.run_migrations()
