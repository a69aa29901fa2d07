"""The facts of a job in the environment of its processes."""

from gptddp.distributed import environment


def test_the_name_of_a_job(monkeypatch, tmp_path):
    """A job is its rendezvous id, endpoint and namespace, or its Slurm step; an id alone is not
    unique."""
    names = ("TORCHELASTIC_RUN_ID", "PET_RDZV_ENDPOINT", "SLURM_PROCID", "RANK", "MASTER_ADDR")
    for name in (*names, "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "RESOLV_CONF", tmp_path / "resolv.conf")
    assert environment.job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert environment.job() is None
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "127.64.0.100:23456")
    one = environment.job()
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "127.64.1.100:23457")
    assert one and environment.job() not in (None, one)
    without = environment.job()
    for text in ("", "search example.org\n", "nameserver 10.0.0.1\nsearch\n"):
        environment.RESOLV_CONF.write_text(text)
        assert environment.job() == without
    for space in ("one", "two"):  # as the kubelet writes it
        domains = f"{space}.svc.cluster.local svc.cluster.local cluster.local example.org"
        environment.RESOLV_CONF.write_text(f"nameserver 10.0.0.1\nsearch {domains}\noptions x\n")
        assert environment.job() == f"{without} in namespace {space}"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert not environment.job().startswith("slurm")  # a shell in a Slurm step
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert environment.job().startswith("slurm-7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "north")
    assert environment.job().startswith("slurm-north.7") and environment.slurm_step()
