"""What a cluster on AWS costs an hour, by the price list that AWS gives to whoever asks with an account.

The list has prices on demand; machines on the spot market cost that at most.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

# Where AWS answers questions about prices; the list itself is of all regions.
_LIST_REGION = "us-east-1"
_WAIT_S = 5


class PricesUnknown(Exception):
    """AWS did not say; the message says why."""


def in_words(config: dict[str, Any], *, client: Any = None) -> str:
    """Return the price of a cluster file's machines, in brackets and with a space before; '' beside AWS.

    Args:
        client: boto3's client of the price list; made when not given.
    """
    provider = config["provider"]
    if provider["type"] != "aws":
        return ""
    try:
        least, most = _machines_of(config)
        prices = {name: hourly_usd(name, provider["region"], client=client) for name in most}
    except PricesUnknown as error:
        return f" (no price: {error})"
    low, high = (sum(prices[name] * number for name, number in counts.items()) for counts in (least, most))
    span = f"{high:.2f}" if least == most else f"{low:.2f} to {high:.2f}"
    return f" ({span} USD an hour on demand, by AWS's list, without disks and traffic)"


def _machines_of(config: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return how many machines of each type there are at least and at most."""
    least: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for name, kind in config["available_node_types"].items():
        machine = kind["node_config"].get("InstanceType")
        if machine is None:
            raise PricesUnknown(f"node type {name!r} has no InstanceType")
        is_head = name == config["head_node_type"]
        least[machine] += 1 if is_head else kind.get("min_workers", 0)
        most[machine] += 1 if is_head else kind.get("max_workers", 0)
    return least, most


def hourly_usd(machine: str, region: str, *, client: Any = None) -> float:
    """Return the price of an hour of a machine type with Linux, on demand.

    Raises:
        PricesUnknown: the list cannot be reached or read by this account, or does not have the type.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    if client is None:
        waits = Config(connect_timeout=_WAIT_S, read_timeout=_WAIT_S, retries={"total_max_attempts": 1})
        client = boto3.client("pricing", region_name=_LIST_REGION, config=waits)
    wanted = {
        "instanceType": machine,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    try:
        found = client.get_products(ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)["PriceList"]
    except ClientError as error:
        raise PricesUnknown(f"AWS's list answers {error.response['Error']['Code']}") from error
    except (BotoCoreError, ResponseParserError) as error:
        raise PricesUnknown(f"AWS's list cannot be asked ({type(error).__name__})") from error
    hourly = [price for product in found for price in _hourly_prices(json.loads(product))]
    if not hourly:
        raise PricesUnknown(f"AWS's list has none of {machine} in {region}")
    return max(hourly)


def _hourly_prices(product: dict[str, Any]) -> list[float]:
    return [
        float(dimension["pricePerUnit"]["USD"])
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == "Hrs" and "USD" in dimension["pricePerUnit"]
    ]
