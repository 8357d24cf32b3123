-- A column for the trace of the attempt that ran the handler, which a replay's trace links to. Nothing is rewritten.
ALTER TABLE semel_keys ADD COLUMN IF NOT EXISTS traceparent text;
