from collections.abc import Iterator

import pytest

from tests.e2e.routers import SHAPE
from tests.processes import Cluster, emulated


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with emulated(tmp_path_factory.mktemp("emulate"), *SHAPE) as running:
        yield running
