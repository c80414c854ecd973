"""Reads every list of the admin API to its end with the client generated from its description."""

import importlib
import os
import pkgutil
import sys

import quorate_admin.api
from quorate_admin import AuthenticatedClient
from quorate_admin.models import Problem
from quorate_admin.types import UNSET

client = AuthenticatedClient(base_url=sys.argv[1], token=os.environ["QUORATE_TOKEN"])
lists = 0
for found in pkgutil.walk_packages(quorate_admin.api.__path__, "quorate_admin.api."):
    name = found.name.rsplit(".", 1)[1]
    if not name.startswith("list_"):
        continue
    call = importlib.import_module(found.name)
    cursor, pages, entries = UNSET, 0, 0
    while True:
        page = call.sync(client=client, limit=1, cursor=cursor)
        assert page is not None and not isinstance(page, Problem), f"{name}: {page}"
        fields = page.to_dict()
        entries += sum(len(value) for value in fields.values() if isinstance(value, list))
        pages += 1
        cursor = page.next_cursor
        if not isinstance(cursor, str):
            break
    assert pages > 1 and entries >= pages, f"{name}: {entries} entries on {pages} pages"
    print(f"{name}: {entries} entries on {pages} pages")
    lists += 1
assert lists >= 5, lists
