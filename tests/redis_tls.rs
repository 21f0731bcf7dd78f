//! TLS: an authority of one's own, a client certificate, and clear words where something is missing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::error::Error as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use support::redis::{RedisServer, free_port};
use support::store::{completion, granted, new_key, works};
use tower_idempotency::store::redis::redis::{ClientTlsConfig, TlsCertificates};
use tower_idempotency::{RedisStore, Store as _, StoreErrorKind};

/// An authority, and a certificate of each side that it signed.
struct Papers {
    folder: tempfile::TempDir,
}

impl Papers {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let this = Self { folder };
        let authority = ["-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt"];
        this.openssl(
            &[&["req", "-nodes", "-newkey", "rsa:2048", "-days", "2"][..], &authority].concat(),
        );
        std::fs::write(this.path("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost").unwrap();
        for side in ["server", "client"] {
            let (key, asked) = (format!("{side}.key"), format!("{side}.csr"));
            let subject = format!("/CN={side}");
            let request = ["req", "-nodes", "-newkey", "rsa:2048", "-subj", &subject];
            this.openssl(&[&request[..], &["-keyout", &key, "-out", &asked]].concat());
            let signed = format!("{side}.crt");
            let sign = ["x509", "-req", "-in", &asked, "-CA", "ca.crt", "-CAkey", "ca.key"];
            let rest = ["-CAcreateserial", "-days", "2", "-extfile", "names", "-out", &signed];
            this.openssl(&[&sign[..], &rest].concat());
        }
        this
    }

    fn openssl(&self, arguments: &[&str]) {
        let output = Command::new("openssl").current_dir(&self.folder).args(arguments).output();
        let output = output.unwrap_or_else(|error| {
            panic!("openssl cannot be run ({error}); `tests/run` says what the tests need")
        });
        assert!(output.status.success(), "openssl {arguments:?}: {output:?}");
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(Path::new(&self.path(name))).unwrap()
    }

    fn serve(&self, clients: &str) -> (RedisServer, u16) {
        let port = free_port();
        let server = RedisServer::start_with(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &self.path("server.crt"),
            "--tls-key-file",
            &self.path("server.key"),
            "--tls-ca-cert-file",
            &self.path("ca.crt"),
            "--tls-auth-clients",
            clients,
        ]);
        (server, port)
    }

    fn authority(&self) -> TlsCertificates {
        TlsCertificates { client_tls: None, root_cert: Some(self.read("ca.crt")) }
    }

    fn both(&self) -> TlsCertificates {
        let (client_cert, client_key) = (self.read("client.crt"), self.read("client.key"));
        let client_tls = Some(ClientTlsConfig { client_cert, client_key });
        TlsCertificates { client_tls, ..self.authority() }
    }
}

/// One test, since the provider is the whole program's and there is none only at the beginning.
#[tokio::test]
async fn a_tls_server_is_reached_once_the_program_has_chosen_a_provider() {
    let papers = Papers::new();
    let (open, open_port) = papers.serve("no");
    let url = format!("rediss://127.0.0.1:{open_port}/");
    let connect = async |certificates: Option<TlsCertificates>, url: &str| {
        let mut builder = RedisStore::builder().call_timeout(Duration::from_secs(4));
        if let Some(certificates) = certificates {
            builder = builder.tls(certificates);
        }
        builder.connect(url).await
    };
    let cause = |error: &tower_idempotency::StoreError| error.source().unwrap().to_string();

    for scheme in ["rediss", "rediss+sentinel", "rediss+cluster"] {
        let url = format!("{scheme}://127.0.0.1:{open_port}/main");
        let error = connect(Some(papers.authority()), &url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
        assert!(cause(&error).contains("install_default()"), "no panic: {error:?}");
    }
    rustls::crypto::ring::default_provider().install_default().unwrap();

    let store = connect(Some(papers.authority()), &url).await.unwrap();
    let lease = granted(&store, new_key()).await;
    store.complete(&lease, &completion(b"answer")).await.unwrap();
    assert!(open.cli(&["dbsize"]) != "0", "it is that server");
    let shown = format!("{store:?}");
    assert!(!shown.contains("CERTIFICATE"), "{shown}");

    let error = connect(None, &url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "an unknown authority: {error:?}");
    let plain = format!("redis://127.0.0.1:{open_port}/");
    let error = connect(None, &plain).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "plain text to a TLS port: {error:?}");
    let error = connect(Some(papers.authority()), &open.url()).await.unwrap_err();
    assert!(cause(&error).contains("use rediss://"), "{error:?}");

    let (_strict, strict_port) = papers.serve("yes");
    let url = format!("rediss://127.0.0.1:{strict_port}/");
    works(&connect(Some(papers.both()), &url).await.unwrap()).await;
    let error = connect(Some(papers.authority()), &url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "no client certificate: {error:?}");
    let nonsense =
        TlsCertificates { client_tls: None, root_cert: Some(b"no certificate".to_vec()) };
    connect(Some(nonsense), &url).await.unwrap_err();
}
