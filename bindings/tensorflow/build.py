"""`python -m horovodlike.tensorflow.build`: compile the ops into the folder of the package, for all its users.

For container images: otherwise each user compiles them on first import, which takes a compiler and some seconds.
"""

from __future__ import annotations

from horovodlike.tensorflow._ops import build


def main() -> None:
    """Compile the ops and say where they are."""
    print(build.build(build.PACKAGE))


if __name__ == "__main__":
    main()
