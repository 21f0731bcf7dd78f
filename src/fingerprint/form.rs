//! Form bodies: the same fields whatever way a client writes them. Python writes a space as `+`,
//! Node as `%20`.

/// A field: name and value, decoded.
pub(super) type Field = (Vec<u8>, Vec<u8>);

/// The fields, by name; those of one name keep their order. `None` if an escape is none, so that
/// decoding would guess.
pub(super) fn fields(body: &[u8]) -> Option<Vec<Field>> {
    let mut fields = body
        .split(|byte| *byte == b'&')
        .filter(|field| !field.is_empty())
        .map(|field| {
            let middle = field.iter().position(|byte| *byte == b'=').unwrap_or(field.len());
            let (name, value) = field.split_at(middle);
            // `a` and `a=` are one field (WHATWG URL, 5.1).
            Some((decoded(name)?, decoded(value.get(1..).unwrap_or_default())?))
        })
        .collect::<Option<Vec<_>>>()?;
    fields.sort_by(|one, other| one.0.cmp(&other.0));
    Some(fields)
}

fn decoded(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        rest = match first {
            b'+' => {
                bytes.push(b' ');
                tail
            }
            b'%' => {
                let digit =
                    |index: usize| tail.get(index).and_then(|byte| char::from(*byte).to_digit(16));
                bytes.push(u8::try_from(digit(0)? * 16 + digit(1)?).ok()?);
                &tail[2..]
            }
            other => {
                bytes.push(other);
                tail
            }
        };
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notation_and_order_of_names_do_not_count_and_repeated_names_keep_theirs() {
        let same = [
            "amount=1&description=two+books&metadata[a]=b",
            "description=two%20books&amount=1&metadata%5Ba%5D=b",
            "amount=1&&description=two%20books&metadata%5ba%5d=%62",
        ];
        for form in same {
            assert_eq!(fields(form.as_bytes()), fields(same[0].as_bytes()), "{form}");
        }
        assert_ne!(fields(b"a=1&a=2"), fields(b"a=2&a=1"));
        assert_ne!(fields(b"a=1%262"), fields(b"a=1&2"));
        assert_ne!(fields(b"a%3D=1"), fields(b"a==1"));
        assert_eq!(fields(b"a"), fields(b"a="));
        assert_eq!(fields(b""), Some(Vec::new()));
    }

    #[test]
    fn an_escape_that_is_none_is_not_guessed_at() {
        for bad in ["a=%", "a=%4", "a=%zz", "%g0=1", "a=%+1"] {
            assert_eq!(fields(bad.as_bytes()), None, "{bad}");
        }
    }
}
