"""Fit the kernels, write the catalogue's file or check it, and print the errors."""

from __future__ import annotations

import argparse
import sys

from benchmarks.kernels import attention, collectives, dispatch, moved, products
from benchmarks.kernels.file import PAGE, PATH, differences, page_of, text_of
from benchmarks.kernels.report import lines, markdown
from benchmarks.kernels.study import Result, Skipped, Study
from benchmarks.kernels.tables import FOLDER

FORMS = (
    attention.studies,
    products.matmul_studies,
    products.grouped_studies,
    products.head_studies,
    moved.studies,
    collectives.studies,
    dispatch.studies,
)


def results() -> tuple[list[Study], list[Skipped]]:
    """All entries, and the rows that identify none."""
    found: list[Result] = [result for form in FORMS for result in form()]
    return (
        [one for one in found if isinstance(one, Study)],
        [one for one in found if isinstance(one, Skipped)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the file, write nothing")
    arguments = parser.parse_args()
    if not FOLDER.is_dir():
        sys.exit("needs the measured kernels in ../shared/validation/kernels")
    studies, skipped = results()
    text = text_of(studies)
    if arguments.check:
        wrong = differences(PATH.read_text(encoding="utf-8"), text)
        if PAGE.read_text(encoding="utf-8") != page_of(markdown(studies)):
            wrong.append(f"{PAGE.name} has other errors")
        print("\n".join(wrong) or f"{PATH.name} and {PAGE.name} are what the tables give")
        sys.exit(bool(wrong))
    PATH.write_text(text, encoding="utf-8")
    PAGE.write_text(page_of(markdown(studies)), encoding="utf-8")
    print("\n".join(lines(studies, skipped)))


if __name__ == "__main__":
    main()
