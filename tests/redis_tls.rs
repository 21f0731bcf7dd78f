//! TLS: an authority of one's own, a client certificate, and clear words where something is missing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::time::Duration;

use support::store::{completion, granted, new_key, works};
use support::tls::Papers;
use tower_idempotency::store::redis::redis::TlsCertificates;
use tower_idempotency::{RedisStore, Store as _, StoreErrorKind};

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
    let cause = |error: &tower_idempotency::StoreError| error.to_string();

    for (scheme, path) in [("rediss", ""), ("rediss+sentinel", "main"), ("rediss+cluster", "")] {
        let url = format!("{scheme}://127.0.0.1:{open_port}/{path}");
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

    // None of these passes by waiting.
    let is_a_mistake = async |certificates: Option<TlsCertificates>, url: &str, words: &[&str]| {
        let error = connect(certificates, url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
        for word in words {
            assert!(cause(&error).contains(word), "no {word:?} in: {error:?}");
        }
    };
    let place = format!("127.0.0.1:{open_port}");
    for (scheme, path) in [("rediss", ""), ("rediss+cluster", "")] {
        let url = format!("{scheme}://{place}/{path}");
        is_a_mistake(None, &url, &[&place, "root_cert", "authority"]).await;
    }
    let other = Papers::new();
    is_a_mistake(Some(other.authority()), &url, &[&place, "root_cert"]).await;
    let plain = format!("redis://127.0.0.1:{open_port}/");
    let error = connect(None, &plain).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "plain text to a TLS port: {error:?}");
    assert!(
        cause(&error).contains("speaks TLS") && cause(&error).contains("rediss://"),
        "{error:?}"
    );
    for scheme in ["rediss", "rediss+sentinel", "rediss+cluster"] {
        let path = if scheme.ends_with("sentinel") { "main" } else { "" };
        let plain_port = format!("{scheme}://127.0.0.1:{}/{path}", open.port());
        let error = connect(Some(papers.authority()), &plain_port).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{scheme} to a plain port: {error:?}");
        assert!(cause(&error).contains("does not speak TLS"), "{scheme}: {error:?}");
        assert!(cause(&error).contains(&open.port().to_string()), "{scheme}: {error:?}");
    }
    let error = connect(Some(papers.authority()), &open.url()).await.unwrap_err();
    assert!(cause(&error).contains("use rediss://"), "{error:?}");

    let (_strict, strict_port) = papers.serve("yes");
    let url = format!("rediss://127.0.0.1:{strict_port}/");
    works(&connect(Some(papers.both()), &url).await.unwrap()).await;
    is_a_mistake(Some(papers.authority()), &url, &["certificate of ours", "client_tls"]).await;
    let strangers = TlsCertificates { client_tls: other.both().client_tls, ..papers.authority() };
    is_a_mistake(Some(strangers), &url, &["certificate of ours", "client_tls"]).await;
    papers.sign("client", "DNS:client", "-1");
    is_a_mistake(Some(papers.both()), &url, &["CertificateExpired", "client_tls"]).await;
    let nonsense =
        TlsCertificates { client_tls: None, root_cert: Some(b"no certificate".to_vec()) };
    is_a_mistake(Some(nonsense), &url, &["PEM"]).await;

    papers.sign("server", "DNS:elsewhere", "2");
    let (_elsewhere, port) = papers.serve("no");
    let url = format!("rediss://127.0.0.1:{port}/");
    is_a_mistake(Some(papers.authority()), &url, &["not for the host", "subjectAltName"]).await;
    papers.sign("server", "IP:127.0.0.1", "-1");
    let (_over, port) = papers.serve("no");
    let url = format!("rediss://127.0.0.1:{port}/");
    is_a_mistake(Some(papers.authority()), &url, &["its time is over", "renew it"]).await;
}
