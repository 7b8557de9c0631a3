"""`python -m dflash_hf`: the same as `dflash-hf`, for `accelerate launch -m dflash_hf train …`."""

from .cli import main

if __name__ == "__main__":
    main()
