//! Multipart bodies: their parts, without the boundary, which clients choose anew for each try.

use http::HeaderValue;

/// A part: its header lines and its content, as sent.
pub(super) type Part<'b> = (&'b [u8], &'b [u8]);

/// A boundary is at most this long (RFC 2046, 5.1.1).
const LONGEST: usize = 70;

/// The parts in their order. `None` if the body is not put together exactly as RFC 2046 says: then
/// its raw bytes have to stand for it.
pub(super) fn parts<'b>(content_type: &HeaderValue, body: &'b [u8]) -> Option<Vec<Part<'b>>> {
    let boundary = boundary(content_type.as_bytes())?;
    let first = [b"--".as_slice(), &boundary].concat();
    let next = [b"\r\n--".as_slice(), &boundary].concat();
    let mut rest = body.strip_prefix(&*first)?;
    let mut parts = Vec::new();
    loop {
        if let Some(end) = rest.strip_prefix(b"--") {
            return matches!(end, b"" | b"\r\n").then_some(parts);
        }
        let part = rest.strip_prefix(b"\r\n")?;
        let end = find(part, &next)?;
        let (part, after) = part.split_at(end);
        // A part without header lines starts with the empty line.
        let (headers, content) = match part.strip_prefix(b"\r\n") {
            Some(content) => (&part[..0], content),
            None => {
                let end = find(part, b"\r\n\r\n")?;
                (&part[..end], &part[end + 4..])
            }
        };
        parts.push((headers, content));
        rest = &after[next.len()..];
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// The `boundary` parameter; of several nobody knows which one is meant.
fn boundary(content_type: &[u8]) -> Option<Vec<u8>> {
    let mut found = None;
    for parameter in content_type.split(|byte| *byte == b';').skip(1) {
        let parameter = parameter.trim_ascii();
        let middle = parameter.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&parameter[..middle], &parameter[middle + 1..]);
        if !name.trim_ascii().eq_ignore_ascii_case(b"boundary") {
            continue;
        }
        let value = value.trim_ascii();
        let value = match value.strip_prefix(b"\"") {
            Some(quoted) => quoted.strip_suffix(b"\"")?,
            None => value,
        };
        let plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b';');
        let valid = (1..=LONGEST).contains(&value.len()) && value.iter().all(plain);
        if !valid || found.replace(value.to_vec()).is_some() {
            return None;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content_type: &'static str, body: &str) -> Option<Vec<(String, String)>> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let parts = parts(&HeaderValue::from_static(content_type), body.as_bytes())?;
        Some(parts.into_iter().map(|(headers, content)| (text(headers), text(content))).collect())
    }

    const WITH_A: &str = "multipart/form-data; boundary=A";

    #[test]
    fn a_new_boundary_changes_nothing_and_every_part_counts() {
        let body = |boundary: &str| {
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n1\r\n\
                 --{boundary}\r\nContent-Disposition: form-data; name=\"f\"\r\nContent-Type: text/plain\r\n\r\n\
                 line\r\n\r\n--not\r\n--{boundary}--\r\n"
            )
        };
        let one = read(WITH_A, &body("A")).unwrap();
        assert_eq!(one.len(), 2);
        assert_eq!(one[1].1, "line\r\n\r\n--not");
        let quoted = "multipart/form-data; charset=utf-8; Boundary=\"long-boundary\"";
        assert_eq!(read(quoted, &body("long-boundary")).unwrap(), one);
        assert_eq!(read(WITH_A, "--A--").unwrap(), []);
        assert_eq!(
            read(WITH_A, "--A\r\n\r\nx\r\n--A--").unwrap(),
            [(String::new(), "x".to_owned())]
        );
    }

    #[test]
    fn what_is_not_put_together_exactly_is_not_taken_apart() {
        let part = "--A\r\na: b\r\n\r\nx";
        for (content_type, body) in [
            (WITH_A, ""),
            (WITH_A, part),
            (WITH_A, "preamble\r\n--A\r\na: b\r\n\r\nx\r\n--A--"),
            (WITH_A, "--A\r\na: b\r\n\r\nx\r\n--A--\r\nepilogue"),
            (WITH_A, "--A \r\na: b\r\n\r\nx\r\n--A--"),
            (WITH_A, "--A\r\na: b\r\nx\r\n--A--"),
            (WITH_A, "--A\r\na: b\r\n\r\nx\r\n--AB--"),
            ("multipart/form-data", "--A--"),
            ("multipart/form-data; boundary=", "----"),
            ("multipart/form-data; boundary=A; boundary=B", "--A--"),
            ("multipart/form-data; boundary=\"A", "--A--"),
        ] {
            assert_eq!(read(content_type, body), None, "{content_type} {body:?}");
        }
    }
}
