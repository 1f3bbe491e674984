"""The command line of a program on a profile's host: it passes on what that is given
and prints, and ends as it does."""

import json
import socket
import sys


def main(path: str, host: str, *words: str) -> int:
    """Run `words` on a host, by way of the holder that listens at `path`."""
    asked = {"host": host, "words": words, "given": sys.stdin.read()}
    with socket.socket(socket.AF_UNIX) as holder:
        try:
            holder.connect(path)
        except OSError as error:
            sys.exit(f"the connection to the profile's engines has ended: {error}")
        holder.sendall(json.dumps(asked).encode() + b"\n")
        for line in holder.makefile():
            told = json.loads(line)
            for key, stream in (("out", sys.stdout), ("err", sys.stderr)):
                stream.write(told.get(key, ""))
                stream.flush()
            if "code" in told:
                return int(told["code"])
    print("the connection to the profile's engines has ended", file=sys.stderr)
    return 255


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
