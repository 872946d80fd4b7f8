"""TLS at the router's port and towards workers, with certificates on either side."""

import os
import ssl
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from certificates import Authority
from eventually import until

from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.tls import Tls
from prefixfleet.store.errors import ConfigError

ASK = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ours")


@pytest.fixture
def pair(authority):
    return authority.issue("server")


@asynccontextmanager
async def listening(rig):
    """The rig's router on another port, as its TLS settings say."""
    site = web.TCPSite(rig.runner, "127.0.0.1", 0, ssl_context=rig.router.files.tls.listener)
    await site.start()
    yield f"https://127.0.0.1:{rig.runner.addresses[-1][1]}/v1/completions"


def client(authority, pair=None):
    context = ssl.create_default_context(cafile=authority.file)
    if pair:
        context.load_cert_chain(pair.cert, pair.key)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, force_close=True))


async def test_the_router_serves_https(rig, authority, pair):
    await rig.start(await rig.engine(), tls_cert_file=pair.cert, tls_key_file=pair.key)

    async with (
        listening(rig) as url,
        client(authority) as session,
        session.post(url, json=ASK) as response,
    ):
        assert response.status == 200


async def test_clients_must_show_a_certificate_if_an_authority_is_set(
    rig, authority, pair, tmp_path
):
    stranger = Authority(tmp_path, "theirs")
    await rig.start(
        await rig.engine(),
        tls_cert_file=pair.cert,
        tls_key_file=pair.key,
        tls_client_ca_file=authority.file,
    )

    async with listening(rig) as url:
        async with (
            client(authority, authority.issue("known")) as session,
            session.post(url, json=ASK) as response,
        ):
            assert response.status == 200
        for shown in (None, stranger.issue("unknown")):
            async with client(authority, shown) as session:
                with pytest.raises((aiohttp.ClientError, ConnectionError)):
                    await session.post(url, json=ASK)


async def test_a_certificate_that_is_exchanged_is_used_without_a_restart(rig, authority, tmp_path):
    pair = Authority(tmp_path, "old").issue("server")
    router = await rig.start(await rig.engine(), tls_cert_file=pair.cert, tls_key_file=pair.key)

    async with listening(rig) as url, client(authority) as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.post(url, json=ASK)
        authority.issue("server")
        for path in (pair.cert, pair.key):
            os.utime(path, ns=(1, 1))
        router.reload()
        async with session.post(url, json=ASK) as response:
            assert response.status == 200


@asynccontextmanager
async def https_worker(engine, context):
    """A TLS end in front of a fake engine; gives its URL."""

    async def forward(request):
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, engine.url + request.path_qs, data=body, headers=headers
            ) as response,
        ):
            return web.Response(
                status=response.status, body=await response.read(), content_type="application/json"
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_workers_over_https_with_certificates_on_both_sides(rig, authority, pair):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pair.cert, pair.key)
    shown = authority.issue("router")
    engine = await rig.engine()

    async with https_worker(engine, context) as url:
        await rig.start(
            engine,
            records=[engine.record(url=url)],
            worker_ca_file=authority.file,
            worker_cert_file=shown.cert,
            worker_key_file=shown.key,
        )
        status, _, _ = await rig.post()

    assert status == 200


async def test_a_worker_whose_certificate_nobody_signed_gets_nothing(rig, authority, pair):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    engine = await rig.engine()

    async with https_worker(engine, context) as url:
        router = await rig.start(engine, records=[engine.record(url=url)], ready=0)
        await until(lambda: "certificate" in router.roster.standings()[0].reason.lower())

        assert (await rig.post())[0] == 503
    assert engine.seen == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tls_cert_file": "absent", "tls_key_file": "absent"}, "TLS_CERT_FILE"),
        ({"tls_cert_file": "absent"}, "TLS_KEY_FILE"),
        ({"tls_client_ca_file": "absent"}, "TLS_CLIENT_CA_FILE"),
        ({"worker_ca_file": "absent"}, "WORKER_CA_FILE"),
        ({"worker_key_file": "absent"}, "WORKER_CERT_FILE"),
    ],
)
def test_wrong_settings_stop_the_start_and_are_named(settings, named):
    with pytest.raises(ConfigError, match=f"PREFIXFLEET_ROUTER_{named}"):
        Tls(RouterSettings(**settings))


def test_a_key_that_is_encrypted_is_refused_and_not_asked_for(authority, pair):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"a password"),
        )
    )

    with pytest.raises(ConfigError, match="encrypted"):
        Tls(RouterSettings(tls_cert_file=pair.cert, tls_key_file=pair.key))
