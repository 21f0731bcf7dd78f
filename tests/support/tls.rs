//! Certificates, made anew for each test.

use std::path::Path;
use std::process::Command;

use tower_idempotency::store::redis::redis::{ClientTlsConfig, TlsCertificates};

use super::redis::{RedisServer, free_port};

/// An authority, and a certificate of each side that it signed.
#[derive(Debug)]
pub struct Papers {
    folder: tempfile::TempDir,
}

impl Papers {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let this = Self { folder };
        let authority = ["-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt"];
        this.openssl(
            &[&["req", "-nodes", "-newkey", "rsa:2048", "-days", "2"][..], &authority].concat(),
        );
        for side in ["server", "client"] {
            let (key, asked) = (format!("{side}.key"), format!("{side}.csr"));
            let subject = format!("/CN={side}");
            let request = ["req", "-nodes", "-newkey", "rsa:2048", "-subj", &subject];
            this.openssl(&[&request[..], &["-keyout", &key, "-out", &asked]].concat());
            this.sign(side, "IP:127.0.0.1,DNS:localhost", "2");
        }
        this
    }

    /// Signs the certificate of one side anew: for these names, from now on for so many days.
    pub fn sign(&self, side: &str, names: &str, days: &str) {
        std::fs::write(self.path("names"), format!("subjectAltName={names}")).unwrap();
        let (asked, signed) = (format!("{side}.csr"), format!("{side}.crt"));
        let sign = ["x509", "-req", "-in", &asked, "-CA", "ca.crt", "-CAkey", "ca.key"];
        let rest = ["-CAcreateserial", "-days", days, "-extfile", "names", "-out", &signed];
        self.openssl(&[&sign[..], &rest].concat());
    }

    fn openssl(&self, arguments: &[&str]) {
        let output = Command::new("openssl").current_dir(&self.folder).args(arguments).output();
        let output = output.unwrap_or_else(|error| {
            panic!("openssl cannot be run ({error}); `tests/run` says what the tests need")
        });
        assert!(output.status.success(), "openssl {arguments:?}: {output:?}");
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(Path::new(&self.path(name))).unwrap()
    }

    pub fn serve(&self, clients: &str) -> (RedisServer, u16) {
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

    pub fn authority(&self) -> TlsCertificates {
        TlsCertificates { client_tls: None, root_cert: Some(self.read("ca.crt")) }
    }

    pub fn both(&self) -> TlsCertificates {
        let (client_cert, client_key) = (self.read("client.crt"), self.read("client.key"));
        let client_tls = Some(ClientTlsConfig { client_cert, client_key });
        TlsCertificates { client_tls, ..self.authority() }
    }
}
