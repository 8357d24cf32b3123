-- How many requests have ended how, by minute: each process adds what it has counted, now and then. Kept for two hours.
CREATE TABLE IF NOT EXISTS semel_counts (
    minute INTEGER NOT NULL, -- its beginning, by the database's clock when it was added
    outcome TEXT NOT NULL, -- as in the metrics; "added": how often processes have added, with or without requests
    n INTEGER NOT NULL,
    PRIMARY KEY (minute, outcome)
) STRICT, WITHOUT ROWID;
