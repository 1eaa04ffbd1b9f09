"""A small demo pool, made once."""

from __future__ import annotations

import pytest

from producers.tasks.demo_pool import PoolInfo, make_demo_pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolInfo:
    return make_demo_pool(tmp_path_factory.mktemp("pool"), seed=3, num_train=14, num_held_out=6, num_sft=40)
