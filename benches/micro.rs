//! What the parts cost within a process, without a network: `cargo bench --bench micro`.
//!
//! For instruction counts, which do not depend on what else the machine does:
//! `valgrind --tool=callgrind target/release/deps/micro-… --bench --profile-time 1 NAME`.

#![allow(missing_docs, clippy::unwrap_used, reason = "made by macros; a bench may panic")]

use std::convert::Infallible;
use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use sha2::{Digest as _, Sha256};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::record::{
    Claim, ClaimOutcome, Completion, Effects, Grant, Millis, OnExpired, Record, State, Terms,
    Writes,
};
use tower_idempotency::{
    Config, Fingerprint, Fingerprints, HeaderRules, HolderId, IdempotencyKey, IdempotencyLayer,
    Identity, KeySyntax, MemoryStore, MissingKey, Recipe, RecipeId, Scope, StorageKey, Store as _,
    StoredResponse,
};

const KEY: &str = "3c8a5cbe-6f9b-4d5e-9d0e-6d0f1e2a3b4c";
/// For how long records stay.
const KEPT: Duration = Duration::from_secs(1);
/// Bodies of requests, in bytes.
const BODIES: [usize; 3] = [200, 4_096, 65_536];

fn keys(c: &mut Criterion) {
    let bare = KEY.as_bytes();
    let quoted = format!("\"{KEY}\"").into_bytes();
    let parse = |key: &[u8]| IdempotencyKey::parse(black_box(key), KeySyntax::BareOrQuoted);
    c.bench_function("key, bare", |b| b.iter(|| parse(bare)));
    c.bench_function("key, quoted", |b| b.iter(|| parse(&quoted)));
    let (identity, key) = (Identity::from("acme"), IdempotencyKey::new(KEY).unwrap());
    c.bench_function("storage key", |b| b.iter(|| StorageKey::new(black_box(&identity), &key)));
}

fn fingerprints(c: &mut Criterion) {
    let request = Request::post("/v1/payments").header("content-type", "application/json");
    let (head, ()) = request.body(()).unwrap().into_parts();
    let recipe = Recipe::new();
    let mut group = c.benchmark_group("fingerprint");
    for length in BODIES {
        let body = Bytes::from(vec![b'x'; length]);
        group.throughput(Throughput::Bytes(length as u64));
        group.bench_function(format!("{length} bytes"), |b| {
            b.iter(|| recipe.fingerprint(black_box(&head), "/v1/payments", &body));
        });
        group.bench_function(format!("{length} bytes, SHA-256 alone"), |b| {
            b.iter(|| Sha256::digest(black_box(&body)));
        });
    }
    group.finish();
}

fn codec(c: &mut Criterion) {
    let response = Response::builder().status(201).header("content-type", "application/json");
    let (head, ()) = response.body(()).unwrap().into_parts();
    let body = Bytes::from(vec![b'x'; 300]);
    let rules = HeaderRules::default();
    let stored = StoredResponse::new(&head, body.clone(), &rules);
    let encoded = stored.encode();
    c.bench_function("response, encode", |b| b.iter(|| black_box(&stored).encode()));
    c.bench_function("response, decode", |b| {
        b.iter(|| StoredResponse::decode(black_box(encoded.clone())));
    });
    let grant = Grant::first(Millis(1_764_000_000_000));
    let record = Record {
        fingerprint: Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [2; 32]),
        holder: HolderId::from_bytes([3; 16]),
        attempt: grant.attempt,
        fence: grant.fence,
        created: grant.created,
        checkpoint: Bytes::new(),
        state: State::Completed { at: grant.created, response: encoded },
    };
    let bytes = record.encode();
    c.bench_function("record, encode", |b| b.iter(|| black_box(&record).encode()));
    c.bench_function("record, decode", |b| b.iter(|| Record::decode(black_box(bytes.clone()))));
}

/// Whole requests through the layer, one after the other on one thread; the handler only answers.
fn layer(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let handler = service_fn(|_: Request<Full<Bytes>>| async {
        let body = Full::new(Bytes::from_static(&[b'x'; 300]));
        let response = Response::builder().status(StatusCode::CREATED);
        Ok::<_, Infallible>(response.header("content-type", "application/json").body(body).unwrap())
    });
    // Records of fresh keys would pile up over millions of rounds.
    let config = Config::builder().scope(Scope::global()).missing_key(MissingKey::PassThrough);
    let config = config.lease(KEPT).retention(KEPT).unknown_retention(KEPT).build().unwrap();
    let layer = IdempotencyLayer::new(config, MemoryStore::new());
    let service = layer.layer(handler);
    let request = |method: Method, key: Option<String>| {
        let request = Request::builder().method(method).uri("/v1/payments");
        let request =
            key.into_iter().fold(request, |request, key| request.header("idempotency-key", key));
        request.body(Full::new(Bytes::from_static(&[b'x'; 200]))).unwrap()
    };
    let go = |request| runtime.block_on(service.clone().oneshot(request)).unwrap();
    let bare = |request| runtime.block_on(handler.oneshot(request)).unwrap();
    let key = || Some(KEY.to_owned());
    let mut group = c.benchmark_group("request");
    // What is sent is made before each, and not measured.
    let (get, post) = (|| request(Method::GET, None), || request(Method::POST, None));
    group.bench_function("GET, no layer", |b| b.iter_batched(get, bare, BatchSize::SmallInput));
    group.bench_function("GET, not covered", |b| b.iter_batched(get, go, BatchSize::SmallInput));
    group.bench_function("POST without a key, no layer", |b| {
        b.iter_batched(post, bare, BatchSize::SmallInput);
    });
    group.bench_function("POST without a key, passed through", |b| {
        b.iter_batched(post, go, BatchSize::SmallInput);
    });
    let mut number = 0_u64;
    let mut fresh = || {
        number += 1;
        request(Method::POST, Some(format!("fresh-{number}")))
    };
    group.bench_function("fresh key", |b| b.iter_batched(&mut fresh, go, BatchSize::SmallInput));
    assert_eq!(go(request(Method::POST, key())).status(), StatusCode::CREATED);
    group.bench_function("replay", |b| {
        b.iter_batched(|| request(Method::POST, key()), go, BatchSize::SmallInput);
    });
    group.finish();
}

/// What the engine asks of the memory store, without the engine: claims, and claims with their completions.
fn store(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (store, identity) = (MemoryStore::new(), Identity::from("acme"));
    let terms = Terms { lease: KEPT, retention: KEPT, unknown_retention: KEPT };
    let fingerprint = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [2; 32]);
    let claim = || Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(fingerprint),
        terms,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    };
    let pay = |key: StorageKey| {
        runtime.block_on(async {
            let ClaimOutcome::Acquired(lease) = store.claim(key, &claim()).await.unwrap() else {
                return;
            };
            let response = Bytes::from_static(&[b'x'; 330]);
            let completion = Completion { terms, response, writes: Writes::Keep };
            store.complete(&lease, &completion).await.unwrap();
        });
    };
    let key = |text: &str| StorageKey::new(&identity, &IdempotencyKey::new(text).unwrap());
    let mut group = c.benchmark_group("memory store");
    let mut number = 0_u64;
    let mut fresh = || {
        number += 1;
        key(&format!("fresh-{number}"))
    };
    group.bench_function("fresh key", |b| b.iter_batched(&mut fresh, pay, BatchSize::SmallInput));
    group.bench_function("done key", |b| {
        b.iter_batched(|| key(KEY), pay, BatchSize::SmallInput);
    });
    group.finish();
}

criterion_group!(benches, keys, fingerprints, codec, store, layer);
criterion_main!(benches);
