# SPDX-License-Identifier: Apache-2.0
"""Options of the mori backend, from the command line to the library."""

from __future__ import annotations

import os
import re

import pytest

from kvferry.transfer.backends.common.settings import parse_settings
from kvferry.transfer.backends.mori.library import create_engine
from kvferry.transfer.backends.mori.settings import MoriSettings
from kvferry.transfer.engine import parse_backend_options
from tests.standins import mori_io


def test_options_come_as_text_and_leave_as_the_librarys_own_settings() -> None:
    options = parse_backend_options(
        "mori.qp_per_transfer=8,mori.num_worker_threads=2,mori.post_batch_size=16,mori.max_send_wr=4096,"
        "mori.max_cqe_num=8192,mori.max_msg_sge=2,mori.notification=true,mori.poll_cq_mode=event"
    )
    settings = parse_settings("mori", MoriSettings, options["mori"])
    with mori_io.on_path():
        import mori.io as library

        config = settings.rdma_config(library)
        assert config.poll_cq_mode == library.PollCqMode.EVENT
    assert (config.qp_per_transfer, config.num_worker_threads, config.post_batch_size) == (8, 2, 16)
    assert (config.max_send_wr, config.max_cqe_num, config.max_msg_sge) == (4096, 8192, 2)
    assert config.enable_notification


def test_devices_and_classes_go_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse_settings(
        "mori", MoriSettings, {"devices": "^mlx5_0+mlx5_1", "nic_index": "0", "traffic_class": "104"}
    )
    for name in (*settings.environment(), "MORI_DISABLE_AUTO_XGMI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MORI_IO_QP_PER_TRANSFER", "1")
    with mori_io.on_path():
        import mori.io as library

        create_engine(library, "name", "127.0.0.1", settings)
        assert os.environ["MORI_RDMA_DEVICES"] == "^mlx5_0,mlx5_1"
        assert os.environ["MORI_IO_RDMA_NIC_IDX"] == "0"
        assert os.environ["MORI_RDMA_TC"] == "104"
        assert "MORI_RDMA_SL" not in os.environ
        assert os.environ["MORI_IO_QP_PER_TRANSFER"] == "4", (
            "a fence has to know how many queue pairs there are"
        )
        assert os.environ["MORI_DISABLE_AUTO_XGMI"] == "0"


def test_what_the_backend_relies_on_is_not_left_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lets variables override its settings object: sizes too, by which we count."""
    others = (
        "QP_MAX_SEND_WR",
        "QP_MAX_CQE",
        "NUM_WORKER_THREADS",
        "NUM_NICS_PER_TRANSFER",
        "ENABLE_CHUNKING",
    )
    for name in others:
        monkeypatch.setenv(f"MORI_IO_{name}", "7")
    monkeypatch.setenv("MORI_IO_QP_RETRY_CNT", "5")
    with mori_io.on_path():
        import mori.io as library

        create_engine(library, "name", "127.0.0.1", MoriSettings(timeout=12))
        assert [os.environ[f"MORI_IO_{name}"] for name in others] == ["8192", "16384", "4", "1", "0"]
        assert os.environ["MORI_IO_QP_TIMEOUT"] == "12"
        assert os.environ["MORI_IO_QP_RETRY_CNT"] == "5", "nothing here depends on it"


def test_defaults_make_sense() -> None:
    settings = parse_settings("mori", MoriSettings, {})
    assert settings == MoriSettings()
    assert not settings.notification
    assert settings.max_send_wr == 8192


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"qp_per_transfre": "4"}, "qp_per_transfre"),
        ({"qp_per_transfer": "many"}, "qp_per_transfer"),
        ({"qp_per_transfer": "0"}, "qp_per_transfer"),
        ({"post_batch_size": "0"}, "post_batch_size"),
        ({"max_send_wr": "0"}, "max_send_wr"),
        ({"retry_count": "8"}, "retry_count"),
        ({"timeout": "32"}, "timeout"),
        ({"poll_cq_mode": "never"}, "poll_cq_mode"),
        ({"probe_s": "-1"}, "probe_s"),
        ({"region_bytes": str(2 << 30)}, "region_bytes"),
        ({"notification": "perhaps"}, "notification"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_settings("mori", MoriSettings, options)


@pytest.mark.parametrize("text", ["qp=1", "mori.qp", "pigeon.wings=2", "mori.=2"])
def test_an_option_that_names_no_backend_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"BACKEND\.NAME=VALUE"):
        parse_backend_options(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("mori.qps=1", "unknown option mori.qps; known: control_timeout_ms, "),
        ("cuda_ipc.sm_shre=0.1", "unknown option cuda_ipc.sm_shre; known: block_words, "),
        ("cuda_ipc.sm_share=9", "cuda_ipc.sm_share must be over 0 and at most 1, got 9"),
        ("mori.qp_per_transfer=many", "options of mori: "),
    ],
)
def test_a_wrong_option_is_refused_where_the_backend_does_not_work(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        parse_backend_options(text)
