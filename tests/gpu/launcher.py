"""A process that launches in each of the driver's ways."""

from tests.standin.driver import Driver, Out, packed

LAUNCHES = (
    "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz",
    "cuGraphLaunch", "cuGraphLaunch_ptsz",
)  # fmt: skip
FORMER = ("cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync", "cuLaunchCooperativeKernelMultiDevice")


class Launcher:
    """A kernel, a stream, and a graph of one kernel."""

    def __init__(self, driver: Driver, kernel: str) -> None:
        """The kernel's name ends in how long it takes: work_1ms."""
        self.driver = driver
        module, _ = driver.do("cuModuleLoadData", Out(8), b"image")
        [self.kernel] = driver.do("cuModuleGetFunction", Out(8), module, kernel)
        [self.stream] = driver.do("cuStreamCreate", Out(8), 1)
        self.graph = 0  # until it is captured
        driver.do("cuStreamBeginCapture_v2", self.stream, 0)
        self.launch("cuLaunchKernel")
        [graph] = driver.do("cuStreamEndCapture", self.stream, Out(8))
        [self.graph] = driver.do("cuGraphInstantiateWithFlags", Out(8), graph, 0)

    def send(self, symbol: str) -> None:
        """Begin a launch by that function."""
        kernel, stream, ones = self.kernel, self.stream, (1, 1, 1, 1, 1, 1)
        form = packed("7I4xQPI4x", *ones, 0, stream, 0, 0)
        arguments: dict[str, tuple[int | bytes | None, ...]] = {
            "cuLaunchKernel": (kernel, *ones, 0, stream, None, None),
            "cuLaunchKernelEx": (form, kernel, None, None),
            "cuLaunchCooperativeKernel": (kernel, *ones, 0, stream, None),
            "cuGraphLaunch": (self.graph, stream),
        }
        self.driver.send(symbol, *arguments[symbol.removesuffix("_ptsz")])

    def launch(self, symbol: str) -> None:
        """Launch by that function, which succeeds."""
        self.send(symbol)
        assert self.driver.receive().result == 0, symbol
