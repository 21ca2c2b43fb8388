"""Words for what speculation did, from the figures of SpecStats.report; for the summary line and the profile."""


def acceptance(report: dict) -> str:
    """Share of drafts kept at each position that was reached; empty where no draft was verified."""
    shares = [share for share in report["acceptance_by_position"] if share is not None]
    return ", ".join(f"{i}: {share:.0%}" for i, share in enumerate(shares, 1))


def gain(report: dict) -> str:
    """What it was worth against plain decode, or why that is not known."""
    if report["gain"] is not None:
        return f"{report['gain']:.2f} x plain decode"
    more = " and extra bytes" if report["experts_per_round"] else ""
    return f"gain{more} not measured: {report['gain_reason']}"
