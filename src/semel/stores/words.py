"""Words that can't be the name of a table or a schema, since names go into SQL as they stand. It knows no statement."""

from __future__ import annotations

#: Reserved by PostgreSQL 18 or by SQLite 3.
RESERVED = frozenset(
    """
    add all alter analyse analyze and any array as asc asymmetric authorization autoincrement between binary both
    case cast check collate collation column commit concurrently constraint create cross current_catalog
    current_date current_role current_schema current_time current_timestamp current_user default deferrable delete
    desc distinct do drop else end escape except exists false fetch for foreign freeze from full grant group having
    if ilike in index initially inner insert intersect into is isnull join lateral leading left like limit localtime
    localtimestamp natural not nothing notnull null offset on only or order outer overlaps placing primary
    references returning right select session_user set similar some symmetric table tablesample then to trailing
    transaction true union unique update user using values variadic verbose when where window with
    """.split()  # noqa: SIM905 - it is read by people
)

#: Names of parts (``WITH judged AS …``) of Semel's own statements, which would hide a table of that name.
PARTS = frozenset(
    """
    aside asked bound changed chosen clock counted deleted destinations discarded due ended ends erased failed few
    fitting followed found free freed given_up gone heads judged kept keys lock locked mine moved names newest noted old
    oldest one parked progressed ready renewed resolved run saved set_aside start stripped swept taken target
    troubled unfinished unsent walked wanted watermark won written
    """.split()  # noqa: SIM905 - it is read by people
)

#: How names begin that belong to a database itself.
PREFIXES = ("sqlite_", "pg_")
