"""Where a relay begins to read: past what was sent, and never past what is committed late."""

import hypothesis.strategies as st
from hypothesis import given, settings

from semel.core.cursor import AFRESH_EVERY, LOOK_BACK_EVERY, LOOK_BACK_SHARE, MAX_ENTRIES, PATIENCE, Cursor, Walk


class Database:
    """Transactions that draw numbers, and commit in any order; what is visible to a walk."""

    def __init__(self) -> None:
        self.next_seq = 1
        self.next_xid = 1
        self.running: dict[int, list[int]] = {}
        self.ready: set[int] = set()
        self.sent: set[int] = set()

    def begin(self) -> None:
        self.running[self.next_xid] = []
        self.next_xid += 1

    def add(self, which: int) -> None:
        if self.running:
            xid = sorted(self.running)[which % len(self.running)]
            self.running[xid].append(self.next_seq)
            self.next_seq += 1

    def commit(self, which: int) -> None:
        if self.running:
            self.ready |= set(self.running.pop(sorted(self.running)[which % len(self.running)]))

    def walk(self, start: int, limit: int) -> tuple[Walk, list[int]]:
        found = sorted(seq for seq in self.ready if seq > start)[:limit]
        xmin = min(self.running, default=self.next_xid)
        return Walk(found[0] if found else None, found[-1] if found else None, xmin, self.next_xid), found

    def send(self, found: list[int]) -> None:
        self.ready -= set(found)
        self.sent |= set(found)


ACTIONS = st.one_of(
    st.tuples(st.just("begin"), st.just(0)),
    st.tuples(st.just("add"), st.integers(0, 5)),
    st.tuples(st.just("commit"), st.integers(0, 5)),
    st.tuples(st.just("relay"), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.integers(1, 30)),
)


@settings(max_examples=400)
@given(st.lists(ACTIONS, max_size=60))
def test_nothing_is_passed_over(actions: list[tuple[str, int]]) -> None:
    """However transactions overlap, no message is ever below the safe place; and once all have ended, a few walks
    send everything.
    """
    database, cursor, now = Database(), Cursor(), 0.0

    def relay(limit: int) -> None:
        start = cursor.start(now)
        walk, found = database.walk(start, limit)
        cursor.note(start, walk, now, now)
        database.send(found)
        hidden = {seq for numbers in database.running.values() for seq in numbers}
        assert all(seq > cursor.safe for seq in database.ready | hidden)

    for action, number in actions:
        now += 0.001
        if action == "relay":
            relay(number)
        elif action == "wait":
            now += number / 10
        elif action == "begin":
            database.begin()
        else:
            getattr(database, action)(number)
    while database.running:
        database.commit(0)
    for _ in range(60):
        now += LOOK_BACK_EVERY
        relay(4)
    assert not database.ready


def test_the_safe_place_follows_the_queue() -> None:
    """While transactions are short, a walk begins behind all that was sent."""
    database, cursor = Database(), Cursor()
    for number in range(100):
        database.begin()
        database.add(0)
        database.commit(0)
        start = cursor.start(number / 1000)
        walk, found = database.walk(start, 10)
        cursor.note(start, walk, number / 1000, number / 1000)
        database.send(found)
    assert cursor.safe >= 97


class TestWriterThatStaysOpen:
    """One transaction that has written something, and does not end."""

    def make(self) -> tuple[Database, Cursor]:
        database, cursor = Database(), Cursor()
        database.begin()
        database.add(0)  # Number 1, not visible.
        for number in range(50):
            database.begin()
            database.add(1)
            database.commit(1)
            start = cursor.start(number / 100)
            walk, found = database.walk(start, 10)
            cursor.note(start, walk, number / 100, number / 100)
            database.send(found)
        return database, cursor

    def test_walks_begin_beyond_it(self) -> None:
        """After a second, walks no longer begin at the place that can't become safe."""
        database, cursor = self.make()
        assert cursor.safe == 0
        assert cursor.start(0.5) == 0
        reached = cursor.start(0.5 + PATIENCE)
        assert reached >= 49
        walk, _ = database.walk(reached, 10)
        cursor.note(reached, walk, 0.5 + PATIENCE, 0.5 + PATIENCE)
        assert cursor.safe == 0
        assert cursor.start(0.6 + PATIENCE) >= reached

    def test_its_message_is_found(self) -> None:
        """When it ends, its message is found by the next look back, which comes within seconds."""
        database, cursor = self.make()
        database.commit(0)
        now = 0.5 + PATIENCE
        while database.ready:
            start = cursor.start(now)
            walk, found = database.walk(start, 10)
            cursor.note(start, walk, now, now)
            database.send(found)
            now += 0.1
        assert now < 0.5 + PATIENCE + LOOK_BACK_EVERY + 1

    def test_looks_back_are_rare_where_they_take_long(self) -> None:
        """A look back that takes a second comes after twenty at the earliest."""
        database, cursor = self.make()
        now = 10.0
        assert cursor.start(now) == 0
        walk, _ = database.walk(0, 10)
        cursor.note(0, walk, now, now + 1)
        assert cursor.start(now + 19) > 0
        assert cursor.start(now + 21.1) == 0


def test_it_begins_anew_now_and_then() -> None:
    """Rows that were written without ``add``, or after a fail-over with lower numbers, are found in minutes."""
    cursor = Cursor()
    cursor.start(0.0)
    for now in (0.0, 0.1):
        cursor.note(0, Walk(8, 9, 5, 5), now, now)
    assert cursor.safe == 7
    assert cursor.start(1.0) == 7
    assert cursor.start(AFRESH_EVERY) == 0
    assert cursor.safe == 0


class TestDue:
    """From which time on messages are looked for that are due again."""

    def test_few_dead_entries(self) -> None:
        """As long as little is read, it is from the beginning on, each time."""
        cursor = Cursor()
        cursor.note_due(0.0, Walk(None, None, 5, 5, due=70.0, entries=MAX_ENTRIES), 1.0, 1.1)
        assert cursor.start_of_due(1.1) == 0.0

    def test_many_dead_entries(self) -> None:
        """Where many are read, it is from the first live one on; and from the beginning after a while, the longer that
        takes the later, or when all begins afresh.
        """
        cursor = Cursor()
        many = Walk(None, None, 5, 5, due=70.0, entries=MAX_ENTRIES + 1)
        cursor.note_due(0.0, many, 1.0, 1.5)
        assert cursor.start_of_due(1.5) == 70.0
        cursor.note_due(70.0, Walk(None, None, 5, 5, due=80.0, entries=3), 2.0, 2.0)
        assert cursor.start_of_due(1.4 + 0.5 / LOOK_BACK_SHARE) == 80.0
        assert cursor.start_of_due(1.5 + 0.5 / LOOK_BACK_SHARE) == 0.0
        cursor.note_due(0.0, many, 20.0, 20.0)
        assert cursor.start_of_due(20.0) == 70.0
        cursor.reset(20.0)
        assert cursor.start_of_due(20.0) == 0.0
