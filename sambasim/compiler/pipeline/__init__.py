"""Pipeline parallelism: the stage of each operator, and the messages between stages."""
