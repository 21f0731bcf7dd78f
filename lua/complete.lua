#!lua flags=allow-oom
--[[ Stores the response and ends the lease.
     One script, because only the last holder may write, and only while nobody has taken over.
     It may exceed maxmemory: the effect has happened, and losing its answer helps nobody.
     The moment in its head is the holder's guess, which stands if the claim is as it was granted.
     What comes first is what nearly every completion needs, in as few strings and calls as it takes.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  ARGV[1]  ended      (the record as it shall be: 84 bytes of head, then the response, at least one opaque byte)
  ARGV[2]  retention  (milliseconds)
  ARGV[3]  accepted   (up to 3 times 36 bytes: recipe id and digest by older recipes; left out if none)
  Returns  1 stored
         | 2 healed
         | 3 restored
         | 4 superseded, response
         | 5 mismatch
         | 6 lost
         | 7 unreadable
]]
local key, ended, retention = KEYS[1], ARGV[1], ARGV[2]

local sub, byte = string.sub, string.byte
local record = redis.call('GET', key)
local version, state = byte(record or '', 1, 2)
-- The first claim of a key as it was granted: nobody has renewed it, noted anything, or taken it over.
if version == 1 and #record == 84 and (state == 6 or state == 7)
  and sub(record, 3, 64) == sub(ended, 3, 64) then
  redis.call('SET', key, ended, 'PX', retention)
  return {1}
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local response, at = sub(ended, 85), struct.pack('>I6', now)
if not record then
  redis.call('SET', key, sub(ended, 1, 70) .. at .. sub(ended, 77), 'PX', retention)
  return {3}
end

if version ~= 1 or #record < 84 then return {7} end
-- The first claim of a key leaves its times to the key's expiry. Here they are written out.
if state == 6 or state == 7 then
  local till = redis.call('PEXPIRETIME', key) - struct.unpack('>I6', record, 71)
  if till > 0 then
    local made = math.max(till - struct.unpack('>I4', record, 77), 0)
    local fence = struct.unpack('>I6', record, 59)
    if fence + 1000 < made then fence = made end
    state = state == 6 and 1 or 5
    record = '\1' .. string.char(state) .. sub(record, 3, 58)
      .. struct.pack('>I6I6I6', fence, made, till) .. sub(record, 77)
  end
end
local length, noted = struct.unpack('>I4I4', record, 77)
local answer = #record - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(length, 1) or 0) then return {7} end

local mine = sub(record, 39, 54) == sub(ended, 39, 54)
if state == 4 then
  local stored = sub(record, 85 + noted)
  if mine then
    if stored == response then
      -- Written again: a WAIT that follows waits for writes of its own connection only.
      redis.call('SET', key, record, 'KEEPTTL')
      return {1}
    end
    return {6}
  end
  local recipe, prints = sub(record, 3, 6), sub(ended, 3, 38) .. (ARGV[3] or '')
  for i = 1, #prints, 36 do
    if sub(prints, i, i + 3) == recipe then
      if sub(prints, i + 4, i + 35) == sub(record, 7, 38) then return {4, stored} end
      break
    end
  end
  return {5}
end

if not mine or state == 2 then return {6} end
redis.call('SET', key, '\1\4' .. sub(record, 3, 70) .. at .. sub(ended, 77), 'PX', retention)
if state == 3 then return {2} end
return {1}
