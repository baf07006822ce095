"""Which rules list a device, by the names that an HCA must have for a selector to match it."""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from cni.policy.document import Use
from cni.policy.value_index import ValueIndex
from host import selectors
from host.discovery import HCA
from host.selectors import Selector

_KEPT = 1024  # devices: what is made for tenants must not grow without end


class Device(msgspec.Struct, frozen=True):
    """The device of an attachment, as rules see it: an HCA, and the resources that have it."""

    hca: HCA
    resources: frozenset[str] = frozenset()  # by which the pod holds it


class DeviceIndex:
    """An index of what rules list as `devices` and `pools`. It keeps what it found of a device."""

    def __init__(self, uses: Iterable[tuple[Use, int]]) -> None:
        listed = list(uses)
        self._pools = ValueIndex((use.pools, number) for use, number in listed)
        by_selector: dict[Selector, int] = defaultdict(int)
        for use, number in listed:
            for selector in use.devices:
                by_selector[selector] |= number
        self._by_name: dict[str, list[tuple[Selector, int]]] = defaultdict(list)
        self._by_no_name: list[tuple[Selector, int]] = []
        for pair in by_selector.items():
            names = selectors.needed_names(pair[0])
            for name in names:
                self._by_name[name].append(pair)
            if not names:
                self._by_no_name.append(pair)
        self._found: dict[Device, int] = {}

    def having(self, device: Device) -> int:
        """The rules that list a device."""
        found = self._found.get(device)
        if found is None:
            if len(self._found) >= _KEPT:
                self._found.clear()
            found = self._found[device] = self._search(device)
        return found

    def _search(self, device: Device) -> int:
        found = 0
        for resource in device.resources:
            found |= self._pools.having(resource)
        listed = [self._by_no_name]
        listed += (self._by_name.get(name, []) for name in selectors.names_of(device.hca))
        for pairs in listed:
            for selector, numbers in pairs:
                if numbers & ~found and selectors.match((selector,), device.hca) is not None:
                    found |= numbers
        return found
