"""What a configuration that is read again changes, and what it does not."""

import hps
from hps.configuration.load import ServiceConfig
from hps.serve.reload import CHANGEABLE, compare
from tests.servers.running_service import document_of, model_of

VERSIONS = [{"version": "2", "sparse_files": ["two"]}]


def configuration(*models, **more):
    return hps.load_configuration(document_of(*models or (model_of("m", ["files"], {"item": 3}),), **more))


def test_every_key_of_the_service_is_one_that_changes_or_is_known_not_to():
    stay = {"host", "port", "fronts", "grpc_port", "lookup_threads", "model_control_mode", "load_models", "otlp_endpoint"}
    stay |= {"tls_certificate_path", "tls_key_path", "tls_client_ca_path"}  # their contents are read again
    assert set(ServiceConfig.model_fields) - CHANGEABLE == stay
    assert set(ServiceConfig.model_fields) > CHANGEABLE


def test_what_may_change_does_and_the_rest_stays():
    running = configuration(service={"drain_s": 1, "port": 1, "bearer_token": "old-1"}, persistent=None)
    wanted = configuration(service={"drain_s": 2, "port": 2, "bearer_token": "new-2"}, model_source={"timeout_s": 3})
    changes = compare(running, wanted, failed=(), kept=())
    assert changes.made == ["service.bearer_token is another one", "service.drain_s is 2.0, was 1.0"]
    assert changes.refused == ["model_source.timeout_s differs", "service.port differs"]
    service = changes.configuration.service
    assert (service.drain_s, service.port, service.bearer_token) == (2.0, 1, "new-2")
    assert compare(changes.configuration, wanted, (), ()).made == []
    assert compare(running, wanted, (), kept=["drain_s"]).configuration.service.drain_s == 1.0


def test_a_model_whose_entry_changes():
    for entry, failed, deployed, stays, says in (
        ({}, False, False, False, None),
        ({}, True, False, False, None),
        ({"gpucacheper": 0.5}, False, False, True, "model m differs in gpucacheper"),
        ({"gpucacheper": 0.5}, True, True, False, "model m is tried as it is now"),
        ({"versions": VERSIONS, "keep_versions": 3}, False, True, False, "model m has other versions, keep_versions"),
        ({"versions": VERSIONS, "gpucacheper": 0.5}, False, False, True, "model m differs in gpucacheper, versions"),
    ):
        running, wanted = (configuration(model_of("m", ["files"], {"item": 3}, **more)) for more in ({}, entry))
        changes = compare(running, wanted, ["m"] if failed else [], ())
        assert changes.deploy == (list(wanted.models) if deployed else [])
        assert changes.configuration.models == (running if stays else wanted).models
        lines = changes.made + changes.refused
        assert lines == [] if says is None else lines[0].startswith(says)


def test_models_that_are_new_and_models_that_are_gone():
    a, b, c = (model_of(name, ["files"], {"item": 3}) for name in "abc")
    wanted = configuration(c, b)
    changes = compare(configuration(a, b), wanted, (), ())
    assert changes.deploy == [wanted.models[0]]
    assert changes.undeploy == ["a"]
    assert changes.made == ["model c is new, and will be loaded", "model a is gone, and will be taken out of service"]
    assert changes.configuration.models == wanted.models
