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


def troubles(report: dict) -> str:
    """What ended drafts that were asked for; empty where nothing did."""
    said = [f"no more drafts of {name}: {why}" for name, why in report["ended"].items()]
    if count := report["failed_windows"]:
        said.append(
            f"{count} window{'s' * (count > 1)} run again without drafts, the last because of: {report['failure']}"
        )
    return "; ".join(said)
