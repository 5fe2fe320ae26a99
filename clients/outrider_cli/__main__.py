"""python -m outrider_cli: the `outrider` command, for where the script is not on the PATH."""

from outrider_cli.app import main

if __name__ == "__main__":
    main()
