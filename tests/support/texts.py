"""A file of sixty numbered lines, and its edited versions."""

TEXT = "".join(f"line {number}\n" for number in range(1, 61)).encode()


def edited(*changes: tuple[int, str], text: bytes = TEXT) -> bytes:
    """Return *text* with other lines in place of some, by their numbers in `TEXT`."""
    for number, line in changes:
        old = f"line {number}\n".encode()
        assert text.count(old) == 1
        text = text.replace(old, line.encode())
    return text
