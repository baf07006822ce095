"""What the rules for a pod say of an attachment of `ipoib`: of its options, and of a parent."""

from cni.attachments.matching import require_allowed
from cni.ipoib import options
from cni.ipoib.options import IpoibOptions
from cni.spec.request import Request
from policy.allowance import Allowance


def by_options(wanted: IpoibOptions, allowance: Allowance) -> Allowance:
    """The allowance with these options, as far as no parent is needed to tell. CNIError 121."""
    require_allowed(allowance, match_device=wanted.match_device)
    for key, is_on in (("proxy_arp", wanted.proxy_arp), ("accept_ra", wanted.accept_ra)):
        if is_on:
            allowance.require_option(key, True, key, "true")
    return _with_pkey(wanted.pkey, allowance)


def completed(
    request: Request, wanted: IpoibOptions, allowance: Allowance
) -> tuple[IpoibOptions, Allowance]:
    """The options with what rules put in where the configuration is silent. CNIError 121."""
    fixed = allowance.filled(request.config.keys, ("pkey", "mtu", "proxy_arp"))
    if not fixed:
        return wanted, allowance
    wanted = options.read(request.with_keys(fixed))
    return wanted, by_options(wanted, allowance)


def as_planned(wanted: IpoibOptions, pkey: int, usual_mtu: int, allowance: Allowance) -> Allowance:
    """The allowance of a child with this P_Key. CNIError 121.

    `usual_mtu` is the one that a child of the parent has if the configuration says none.
    """
    allowance = _with_pkey(pkey, allowance)
    if wanted.mtu and wanted.mtu != usual_mtu:
        allowance.require_option("mtu", wanted.mtu, "mtu", wanted.mtu)
    return allowance


def _with_pkey(pkey: int | None, allowance: Allowance) -> Allowance:
    if pkey is None:
        return allowance
    return allowance.using("pkeys", pkey, "pkey", f"{pkey:#06x}")
