"""ipyparallel's controller, small and encrypted where the profile says nothing else."""

from typing import Any

from ipyparallel.controller.app import IPController
from traitlets.config import Config

from labkit import timeouts
from labkit.compat.ipyparallel import spare_controller

_MORE_MISSES = int(timeouts.UNHEARD_S / timeouts.ASK_S)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "IPController": {
        "ip": "*",
        "enable_curve": True,
        "use_threads": True,
        "db_class": "ipyparallel.controller.dictdb.NoDB",
        "log_level": "ERROR",
    },
    # An engine that is not heard for so long counts as gone.
    "HeartMonitor": {
        "period": int(timeouts.ASK_S * 1000),
        "max_heartmonitor_misses": _MORE_MISSES,
    },
}


class Controller(IPController):
    """With other defaults: the profile's files and its command line come first."""

    name = IPController.name

    def load_config_file(self, *args: Any, **settings: Any) -> None:
        super().load_config_file(*args, **settings)
        missing = Config()
        for section, values in _DEFAULTS.items():
            for name, value in values.items():
                if name not in self.config[section]:
                    missing[section][name] = value
        self.update_config(missing)


if __name__ == "__main__":
    spare_controller()
    Controller.launch_instance()
