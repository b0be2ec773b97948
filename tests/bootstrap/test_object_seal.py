"""Envelopes of objects: each changed, replayed, exchanged or shortened one is refused, and nothing of it is read."""

from __future__ import annotations

import pytest

from horovodlike._net.object_seal import NO_ROOT, Context, ObjectSeal
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import HorovodInternalError, IntegrityError

KEY = JobKey(b"k" * 32)
CONTEXT = Context("thing", 3, 1, [0, 2, 5])


def seal(rank: int, data: bytes | None, context: Context = CONTEXT, key: JobKey = KEY) -> bytes:
    return ObjectSeal(key, rank).seal(context, data)


def opened(envelopes: bytes, context: Context = CONTEXT, key: JobKey = KEY) -> list[tuple[int, bytes | None]]:
    found = ObjectSeal(key, 0).open(context, memoryview(envelopes))
    return [(each.rank, None if each.data is None else bytes(each.data)) for each in found]


def test_what_was_sent_arrives() -> None:
    assert opened(seal(0, b"one") + seal(2, b"") + seal(5, None)) == [(0, b"one"), (2, b""), (5, None)]
    assert opened(seal(2, b"the others have joined")) == [(2, b"the others have joined")]


def test_every_byte_counts() -> None:
    sent = seal(0, b"first") + seal(2, b"second")
    for position in range(len(sent)):
        changed = bytearray(sent)
        changed[position] ^= 0x80
        with pytest.raises(IntegrityError, match="thing: .* is not authentic on rank 0.* not unpickled.*security"):
            opened(bytes(changed))
    for length in set(range(len(sent))) - {0, len(seal(0, b"first"))}:  # how much has come is known otherwise
        with pytest.raises(IntegrityError):
            opened(sent[:length])


@pytest.mark.parametrize(
    "context",
    [CONTEXT._replace(name="think"), CONTEXT._replace(process_set=4), CONTEXT._replace(registration=2)],
    ids=["name", "process-set", "registration"],
)
def test_another_operation(context: Context) -> None:
    with pytest.raises(IntegrityError, match="the object that rank 0 has sent"):
        opened(seal(0, b"x"), context)


def test_another_generation() -> None:
    with pytest.raises(IntegrityError):
        opened(seal(0, b"x"), key=KEY.derive(b"another"))


def test_the_senders_stand_in_their_order_and_once() -> None:
    first, second = seal(0, b"a"), seal(2, b"b")
    for wrong in (second + first, first + first, seal(1, b"no member")):
        with pytest.raises(IntegrityError):
            opened(wrong)


def test_an_older_object_is_not_taken_again() -> None:
    sender, reader = ObjectSeal(KEY, 2), ObjectSeal(KEY, 0)
    sent = [memoryview(sender.seal(CONTEXT, str(number).encode())) for number in range(3000)]
    for number in (1, 0, 5, 3):  # operations of several threads complete in any order
        assert reader.open(CONTEXT, sent[number])[0].data == str(number).encode()
        with pytest.raises(IntegrityError, match="an older object was put in its place"):
            reader.open(CONTEXT, sent[number])
    reader.open(CONTEXT, sent[2999])
    reader.open(CONTEXT, sent[2998])
    for number in (0, 4, 2999 - 1024, 2998, 2999):
        with pytest.raises(IntegrityError):
            reader.open(CONTEXT, sent[number])
    reader.open(CONTEXT, sent[2999 - 1023])


def test_a_forged_number_does_not_move_the_window() -> None:
    sender, reader = ObjectSeal(KEY, 2), ObjectSeal(KEY, 0)
    first, forged = sender.seal(CONTEXT, b"x"), bytearray(sender.seal(CONTEXT, b"y"))
    forged[:8] = b"\xff" * 8
    with pytest.raises(IntegrityError):
        reader.open(CONTEXT, memoryview(bytes(forged)))
    assert reader.open(CONTEXT, memoryview(first))[0].data == b"x"


def test_alone_nothing_is_verified() -> None:
    alone = ObjectSeal(None, 0)
    context = Context("thing", 0, 0, [0])
    assert bytes(alone.open(context, memoryview(alone.seal(context, b"x", NO_ROOT)))[0].data or b"") == b"x"


def test_its_error_is_one_that_elastic_training_catches() -> None:
    assert issubclass(IntegrityError, HorovodInternalError)


def _agree() -> list[str]:
    from horovodlike import basics, objects
    from horovodlike.errors import MismatchError

    told = []
    for call in (
        lambda: objects.broadcast_object(1, basics.rank(), "root"),
        lambda: objects.highest("numbers", [0] * (1 + basics.rank())),
    ):
        try:
            call()
        except MismatchError as error:
            told.append(str(error))
    assert objects.allgather_object(basics.rank(), "after") == list(range(basics.size()))
    return told


def test_ranks_that_disagree(ranks) -> None:  # type: ignore[no-untyped-def]
    roots = "rank 0 calls broadcast_object with root 0, rank 1 calls broadcast_object with root 1"
    told = ranks(2).run(_agree)
    assert told == [[f"root: the ranks do not agree: {roots}", "numbers: the ranks gave 1, 2 numbers"]] * 2
