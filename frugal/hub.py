"""Whether the model hub answers. Imports no torch: wrong names are told before it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

from huggingface_hub import constants


def reachable() -> bool:
    """Whether the hub answers. Asked once: a download would try six times for half a minute, printing each failure."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:  # a certificate that only the hub library accepts: let it try
        return not isinstance(error.reason, socket.gaierror | ConnectionError | TimeoutError)
    except TimeoutError:
        return False
    return True
