-- A column for the trace of the attempt that ran the handler, which a replay's trace links to. It is added behind the
-- body, since anything else would mean to write the whole table again; so lists do not read it.
ALTER TABLE semel_keys ADD COLUMN traceparent TEXT;
