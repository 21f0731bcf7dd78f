//! B. Key syntax. Lines and bytes that an HTTP stack may refuse itself are in `wire_requests`.

use tower_idempotency::{KeySyntax, MissingKey};

use crate::harness::{Shop, post};

/// These values name one operation: the first runs, the others replay.
#[track_caller]
fn one_key<const N: usize>(values: [&str; N]) -> impl Future<Output = ()> {
    let values = values.map(str::to_owned);
    async move {
        let shop = Shop::open();
        let [first, others @ ..] = &values[..] else { panic!("at least one value") };
        let first = shop.send(&post("/payments").key(first)).await.fresh(201);
        for other in others {
            shop.send(&post("/payments").key(other)).await.replay_of(&first);
        }
        shop.send(&post("/payments").key(&values[0])).await.replay_of(&first);
        shop.ledger.expect(1);
    }
}

async fn refused<T: AsRef<[u8]>>(values: impl IntoIterator<Item = T>) {
    let shop = Shop::open();
    for value in values {
        let seen = shop.send(&post("/payments").key(value)).await.refused(400, "key_invalid");
        assert_eq!(seen.json()["safe_new_key"], true);
        assert_eq!(seen.header("idempotency-key"), None, "a malformed key is not echoed");
    }
    shop.expect_untouched();
}

// cases: 12
#[tokio::test]
async fn case_012_a_uuid_in_quotes_is_accepted() {
    one_key(["\"8e03978e-40d5-43e8-bc93-6894a57f9324\""]).await;
}

// cases: 13, 23
#[tokio::test]
async fn case_013_a_bare_uuid_is_accepted_unless_quotes_are_required() {
    one_key(["8e03978e-40d5-43e8-bc93-6894a57f9324"]).await;
    let strict = Shop::with(|config| config.key_syntax(KeySyntax::QuotedOnly));
    for bare in ["8e03978e-40d5-43e8-bc93-6894a57f9324", "abc", "42", "?1", ":YWJj:", "@1"] {
        strict.send(&post("/payments").key(bare)).await.refused(400, "key_invalid");
    }
    strict.expect_untouched();
    strict.send(&post("/payments").key("\"abc\"")).await.fresh(201);
}

// cases: 14
#[tokio::test]
async fn case_014_a_bare_key_and_the_same_key_quoted_are_one() {
    one_key(["abc", "\"abc\""]).await;
    one_key(["\"abc\"", "abc"]).await;
}

// cases: 15
#[tokio::test]
async fn case_015_escapes_are_undone() {
    one_key([r#""a\"b\\c""#]).await;
}

// cases: 16, 18, 19
#[tokio::test]
async fn case_016_what_is_no_structured_field_string_is_refused() {
    refused([r#""a\x""#, "\"abc", "\"", r#"abc""#]).await;
    refused([r#""k";=1"#, r#""k" x"#, r#""k","#, r#""k";"#]).await;
    refused([r#""a", "b""#, "a, b", "a,b"]).await;
}

// cases: 17
#[tokio::test]
async fn case_017_parameters_are_ignored() {
    one_key(["\"k\"", "\"k\";v=1", "\"k\"; a; b=\"x\"", "k"]).await;
}

// cases: 24
#[tokio::test]
async fn case_024_an_empty_key_is_refused() {
    refused(["", "\"\"", " ", "\t", "\"\";v=1"]).await;
}

// cases: 25
#[tokio::test]
async fn case_025_a_key_has_up_to_255_bytes_after_unquoting_and_is_never_cut() {
    let longest = "k".repeat(255);
    one_key([&longest, &format!("\"{longest}\"")]).await;
    one_key([&format!("\"{}\"", r"\\".repeat(255))]).await;
    let over = "k".repeat(256);
    refused([over.clone(), format!("\"{over}\""), "k".repeat(3000), "k".repeat(60_000)]).await;
}

// cases: 26
#[tokio::test]
async fn case_026_spaces_stand_in_quoted_keys_only() {
    refused(["a b", "a\tb", "\"a\tb\""]).await;
    one_key(["\"a b\"", "\"a b\";v=1"]).await;
}

// cases: 27
#[tokio::test]
async fn case_027_space_around_the_value_is_no_part_of_it() {
    one_key(["abc", "  abc", "abc\t ", " \"abc\" "]).await;
}

// cases: 28
#[tokio::test]
async fn case_028_bytes_beyond_ascii_are_refused() {
    refused(["caf\u{e9}".as_bytes(), b"caf\xe9", b"\"caf\xe9\"", b"\xff", "ключ".as_bytes()]).await;
    refused((0x80..=0xff_u8).map(|byte| [b'k', byte])).await;
}

// cases: 30
#[tokio::test]
async fn case_030_keys_are_compared_byte_for_byte() {
    let shop = Shop::open();
    for key in ["ABC", "abc", "abc1", "ab"] {
        shop.send(&post("/payments").key(key)).await.fresh(201);
    }
    shop.ledger.expect(4);
}

// cases: 31
#[tokio::test]
async fn case_031_a_short_key_is_accepted() {
    one_key(["1"]).await;
    one_key(["null"]).await;
    one_key(["undefined"]).await;
}

// cases: 32
#[tokio::test]
async fn case_032_the_automatic_keys_of_official_sdks_are_accepted() {
    one_key(["c5c1b35b-4b5d-92b7-0d25-aa6c8e2f6a10"]).await;
    one_key(["stripe-node-retry-0f8fad5b-d9cb-469f-a165-70867728950e"]).await;
    one_key(["1764403200000000000_a-b_C9"]).await;
}

// cases: 33
#[tokio::test]
async fn case_033_a_malformed_key_is_refused_where_keys_are_optional_too() {
    let shop = Shop::with(|config| config.missing_key(MissingKey::PassThrough));
    for bad in ["", "a b", "\"abc"] {
        shop.send(&post("/payments").key(bad)).await.refused(400, "key_invalid");
    }
    shop.expect_untouched();
}

// cases: 34
#[tokio::test]
async fn case_034_the_key_is_judged_before_the_body() {
    let shop = Shop::with(|config| config.request_limit(4));
    let ask = post("/payments").body("{ this is no JSON, and too long");
    shop.send(&ask.clone().key("a b")).await.refused(400, "key_invalid");
    shop.send(&ask).await.refused(400, "key_missing");
    shop.expect_untouched();
}

// cases: 44
#[tokio::test]
async fn case_044_characters_that_mean_something_elsewhere_are_only_characters() {
    let shop = Shop::open();
    let keys = ["*", "{x}", "[", "%0d%0a", "?", "a:b", "{", "}", "$1", "'", "../x", "a|b"];
    for (index, key) in keys.iter().enumerate() {
        shop.send(&post("/payments").key(key)).await.fresh(201);
        shop.ledger.expect(index + 1);
    }
    for key in keys {
        shop.send(&post("/payments").key(key)).await.replayed(201);
    }
    shop.ledger.expect(keys.len());
}
