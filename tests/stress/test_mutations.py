"""The list of faults fits the package: each text stands there once, and its tests are there."""

from __future__ import annotations

from collections import Counter

from tests.stress.mutate_package import MUTATIONS, chosen, places_of
from tests.stress.mutations import Misplaced, Package
from tests.support import ROOT


def test_each_mutation_has_its_one_place() -> None:
    package, wrong = Package(ROOT), []
    for mutation in MUTATIONS:
        try:
            path, _ = package.mutated(mutation)
        except Misplaced as error:
            wrong.append(str(error))
            continue
        place = path.relative_to(ROOT / "monograph").with_suffix("").as_posix()
        if not f"{place}/".startswith(f"{mutation.area}/"):
            wrong.append(f"{mutation}: stands in {place}")
        if mutation.before == mutation.after:
            wrong.append(f"{mutation}: changes nothing")
    assert not wrong, "\n".join(wrong)


def test_each_mutation_names_tests() -> None:
    assert not [str(mutation) for mutation in MUTATIONS if not places_of(ROOT, mutation.tests)]


def test_no_mutation_is_listed_twice() -> None:
    again = Counter((mutation.before, mutation.after, mutation.file) for mutation in MUTATIONS)
    assert not [before for (before, _, _), times in again.items() if times > 1]


def test_every_folder_of_the_package_has_mutations() -> None:
    folders = {path.name for path in (ROOT / "monograph").iterdir() if (path / "__init__.py").exists()}
    mutated = {mutation.area.split("/")[0] for mutation in MUTATIONS}
    assert folders - mutated == {"integrations"}  # whose tests need other packages


def test_an_area_takes_in_the_folders_inside_it() -> None:
    areas = {mutation.area for mutation in chosen(["capture"], older=False)}
    assert {"capture", "capture/guards", "capture/guards/sources"} <= areas
    assert all(area.split("/")[0] == "capture" for area in areas)
    assert not any(mutation.is_new for mutation in chosen([], older=True))
