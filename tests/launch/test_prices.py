"""Prices by AWS's list: the shape of its answers is botocore's own model, checked by its stubber."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.stub import ANY, Stubber

from horovod_tune.launch.prices import PricesUnknown, hourly_usd, in_words


def product(*prices: tuple[str, str]) -> str:
    dimensions = {
        f"code.{i}": {"unit": unit, "pricePerUnit": {"USD": price}} for i, (unit, price) in enumerate(prices)
    }
    return json.dumps({"product": {}, "terms": {"OnDemand": {"sku": {"priceDimensions": dimensions}}}})


def client() -> tuple[Any, Stubber]:
    made = boto3.client("pricing", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    return made, Stubber(made)


def cluster(**worker: Any) -> dict[str, Any]:
    return {
        "provider": {"type": "aws", "region": "us-west-2"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"node_config": {"InstanceType": "m7i.2xlarge"}, "max_workers": 0},
            "worker": {"node_config": {"InstanceType": "g5.2xlarge"}, **worker},
        },
    }


def answer(stubber: Stubber, *products: str) -> None:
    expected = {"ServiceCode": "AmazonEC2", "Filters": ANY, "MaxResults": 10}
    stubber.add_response("get_products", {"PriceList": list(products)}, expected)


def test_the_price_of_a_cluster_is_that_of_its_head_to_all_of_its_machines() -> None:
    made, stubber = client()
    answer(stubber, product(("Hrs", "0.4032000000")))
    answer(stubber, product(("Hrs", "1.2120000000")))
    with stubber:
        words = in_words(cluster(min_workers=0, max_workers=3), client=made)
    assert words == " (0.40 to 4.04 USD an hour on demand, by AWS's list, without disks and traffic)"


def test_a_cluster_of_one_size_has_one_price() -> None:
    made, stubber = client()
    answer(stubber, product(("Hrs", "0.5")))
    answer(stubber, product(("Hrs", "1")))
    with stubber:
        assert " (2.50 USD an hour" in in_words(cluster(min_workers=2, max_workers=2), client=made)


def test_the_list_is_asked_for_linux_of_the_region() -> None:
    made, stubber = client()
    pairs = {
        "instanceType": "p5.48xlarge",
        "regionCode": "eu-north-1",
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in pairs.items()]
    expected = {"ServiceCode": "AmazonEC2", "Filters": filters, "MaxResults": 10}
    # Only prices by the hour count.
    prices = [product(("Quantity", "900"), ("Hrs", "98.32"))]
    stubber.add_response("get_products", {"PriceList": prices}, expected)
    with stubber:
        assert hourly_usd("p5.48xlarge", "eu-north-1", client=made) == 98.32


@pytest.mark.parametrize("products", [[], [product(("Quantity", "1"))], ['{"terms": {}}']])
def test_a_type_that_the_list_does_not_have_has_no_price(products: list[str]) -> None:
    made, stubber = client()
    answer(stubber, *products)
    with stubber, pytest.raises(PricesUnknown, match=r"none of g5\.2xlarge in us-west-2"):
        hourly_usd("g5.2xlarge", "us-west-2", client=made)


def test_an_account_that_may_not_ask_is_told_so() -> None:
    made, stubber = client()
    stubber.add_client_error("get_products", "AccessDeniedException")
    with stubber:
        words = in_words(cluster(max_workers=1), client=made)
    assert words == " (no price: AWS's list answers AccessDeniedException)"


def test_a_list_out_of_reach_does_not_stop_the_launch() -> None:
    class Unreachable:
        def get_products(self, **asked: Any) -> Any:
            raise EndpointConnectionError(endpoint_url="https://nowhere")

    assert "cannot be asked (EndpointConnectionError)" in in_words(
        cluster(max_workers=1), client=Unreachable()
    )


def test_a_file_with_a_launch_template_has_no_price() -> None:
    config = cluster(max_workers=1)
    config["available_node_types"]["head"]["node_config"] = {"LaunchTemplate": {"LaunchTemplateId": "lt-1"}}
    assert in_words(config) == " (no price: node type 'head' has no InstanceType)"


def test_other_clouds_and_machines_of_ones_own_have_none() -> None:
    assert in_words({"provider": {"type": "local"}}) == "" == in_words({"provider": {"type": "gcp"}})
