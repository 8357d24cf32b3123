CREATE TABLE accounts (name text PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO accounts VALUES ('alice', 100), ('bob', 0);
