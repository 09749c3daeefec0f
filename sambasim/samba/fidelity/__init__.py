"""What of SambaFlow is the same here, what is simplified, what changes nothing and what is absent: as rows.

    api.py          every name that apps import or call
    flags.py        every flag
    behaviours.py   what an app relies on, and no name stands for
    page.py         the rows as the tables of the page, sambasim/samba/README.md

The tests hold the rows against the code, and the page against the rows (`make golden` writes it anew).
"""
