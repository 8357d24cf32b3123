-- How many requests have ended how, by minute: each process adds what it has counted, now and then. Kept for two hours.
CREATE TABLE IF NOT EXISTS semel_counts (
    minute  timestamptz      NOT NULL,   -- its beginning, by the server's clock when it was added
    outcome text COLLATE "C" NOT NULL,   -- as in the metrics; "added": how often processes have added, with or without
    n       bigint           NOT NULL,   -- requests of their own

    PRIMARY KEY (minute, outcome)
);
