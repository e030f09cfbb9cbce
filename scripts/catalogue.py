"""Build the catalogue of vLLM releases that ships with the audit, or add a release to it.

    make catalogue                       all seven releases, anew
    make catalogue RELEASES=0.33.0       that one besides those in it

A release is read from its sources: what `make matrix` fetched, else the package index. Half a minute for each.
"""

from __future__ import annotations

import argparse
import sys

from vllm_graft.audit.releases.catalogue import FILE, CatalogueBuilder
from vllm_graft.audit.releases.source_release import fetch
from vllm_graft.audit.releases.wheels import open_release
from vllm_graft.cli.printing import ProgressLine
from vllm_graft.errors import GraftError

SEVEN = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


def read_into(builder: CatalogueBuilder, version: str) -> None:
    """Add one release and print progress."""
    line = ProgressLine()
    source = open_release(version, progress=lambda done, size: line(f"fetching {version}", done, size))
    fetch(source, source.modules())
    builder.add(version, source, lambda done, size: line(f"reading {version}", done, size))


def main() -> int:
    """Build the catalogue or add to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", metavar="RELEASES", help="releases to add, with commas; without it all seven anew")
    args = parser.parse_args()
    wanted = args.add.split(",") if args.add else SEVEN
    try:
        builder = CatalogueBuilder(FILE if args.add else None)
        for version in wanted:
            if version in builder.releases:
                print(f"catalogue: it has {version} already", file=sys.stderr)
                continue
            read_into(builder, version)
        builder.write(FILE)
    except GraftError as error:
        print(f"catalogue: {error}", file=sys.stderr)
        return 1
    print(f"catalogue: {', '.join(builder.releases)}: {FILE.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
