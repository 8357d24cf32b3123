-- The plain layout, from the partitioned one: new answers stay in their rows. The table goes when the last answer in it
-- has expired.
DROP TRIGGER IF EXISTS semel_keys_answer ON semel_keys;

DROP TABLE IF EXISTS semel_answers;
