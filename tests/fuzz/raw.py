"""Changes to the bytes of any file, by who knows nothing of its format."""

from collections.abc import Sequence
from random import Random

from tests.fuzz.subject import Mutation


def flipped_bits(random: Random, samples: Sequence[bytes]) -> bytes:
    data = bytearray(random.choice(samples))
    for _ in range(random.choice([1, 1, 2, 8, 64])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def truncated(random: Random, samples: Sequence[bytes]) -> bytes:
    data = random.choice(samples)
    return data[: random.randrange(len(data))]


def grown(random: Random, samples: Sequence[bytes]) -> bytes:
    data = random.choice(samples)
    place = random.choice([0, len(data), random.randrange(len(data))])
    return data[:place] + random.choice([b"\0", b"PK\5\6", random.randbytes(100), data[:1000]]) + data[place:]


def cut_out(random: Random, samples: Sequence[bytes]) -> bytes:
    data = random.choice(samples)
    start = random.randrange(len(data))
    return data[:start] + data[start + random.choice([1, 8, 64, 4096]) :]


def spliced(random: Random, samples: Sequence[bytes]) -> bytes:
    first, second = random.choice(samples), random.choice(samples)
    return first[: random.randrange(len(first))] + second[random.randrange(len(second)) :]


def overwritten_numbers(random: Random, samples: Sequence[bytes]) -> bytes:
    """Little-endian numbers at places where formats like to have sizes: the beginning and the end."""
    data = bytearray(random.choice(samples))
    width = random.choice([2, 4, 8])
    place = random.choice([random.randrange(200), len(data) - random.randrange(1, 200)]) % max(len(data) - width, 1)
    number = random.choice([0, 1, 1 << 31, (1 << 8 * width) - 1, (1 << (8 * width - 1)), len(data)])
    data[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(data)


RAW: Sequence[Mutation] = (flipped_bits, truncated, grown, cut_out, spliced, overwritten_numbers)
