"""What silently goes wrong in data parallel apps on the hardware, and is said aloud here.

Every finding has a stable code, a row in `findings.py`, and one file that looks for it:

    code         file             looks at
    DP01, DP02   sync.py          what was typed, and what session.run is told
    DP03, DP07   weights.py       digests of the parameters, and the hyperparameters
    DP04, DP05   samples.py       digests of the batches
    DP04..DP06   samplers.py      torch's DistributedSampler, which is watched
    DP08         files.py         the files that are opened for writing, which are watched
    DP09         meeting.py       how many steps the replicas take; with samplers.py, of which epoch
    AP01         ../binding.py    the shapes of a batch
    AP02, DP02   arguments.py     the command line now and when the PEF was compiled
    AP03         conversions.py   the values of a batch
    AP04         keywords.py      what functions of the library are called with
    AP05         unsent.py        the app's optimizers and weights, once the device has them
    AP05         unclipped.py     torch's clipping of gradients, which is watched
    AP06         unfetched.py     the model's state_dict, torch.save, and calls on the host, which are watched
    AP07         untrained.py     backwards without an optimizer step

`replicas.py` asks those that compare replicas, in the few steps in which they do; `watching.py` holds what is watched
from when the ranks have met until they leave. `telling.py` decides what becomes of a finding: an error or a notice,
and with `sambasim app --check`, which is `on_demand.py`, a line of a report.
"""
