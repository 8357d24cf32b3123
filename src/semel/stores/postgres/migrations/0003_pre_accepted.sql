-- Operations that are accepted, and run by a worker; how far a handler says it is; whose process holds a key.
ALTER TABLE semel_keys
    ADD COLUMN accepted  boolean NOT NULL DEFAULT false,
    ADD COLUMN milestone text,
    ADD COLUMN owner     bigint,
    ADD CONSTRAINT semel_keys_pending CHECK (state <> 'pending' OR accepted),
    ADD CONSTRAINT semel_keys_accepted CHECK (NOT accepted OR request IS NOT NULL OR state IN ('complete', 'failed')),
    ADD CONSTRAINT semel_keys_milestone CHECK (milestone IS NULL OR state <> 'pending');
