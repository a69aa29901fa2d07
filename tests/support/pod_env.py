"""The environment of one of our pods."""

# The variables that operator and manifest give to the second of four pods.
ENV = {
    "POD_NAME": "demo-worker-1",
    "HOSTNAME": "demo-worker-1",
    "GPTDDP_GRACE_S": "60",
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "1",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "demo-worker-0:23456",
    "PET_RDZV_ID": "demo-1a2b3c4d",
    # from manifests of other versions
    "PET_MAX_RESTARTS": "1000",
    "PET_RDZV_CONF": "join_timeout=600,last_call_timeout=1",
}
